"""What an experiment asks: its file, its folder, and the template of a new one."""
