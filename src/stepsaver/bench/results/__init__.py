"""What is stored: files that vouch for themselves, and what a run is identified by."""
