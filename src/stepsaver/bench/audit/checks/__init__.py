"""One check per file: its `ORDER`, and `findings(task)`; the file's name is the check's."""
