"""The CPU in single precision: compiled operations, layouts of weights, and the memory that both take."""
