"""What is stored: files with checksums, and what identifies a run."""
