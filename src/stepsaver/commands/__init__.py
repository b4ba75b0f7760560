"""The commands of the command line: one file each, with `HELP`, `add_arguments` and `run`."""
