"""One check per file, which has `ORDER` and `findings(task)`; the file's name is the name of the check."""
