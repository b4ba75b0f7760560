"""What a machine is and can do: its facts, its limits, the speed of the engine on it."""
