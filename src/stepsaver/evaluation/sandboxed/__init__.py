"""What runs inside the sandbox, with only the standard library. `stepsaver.evaluation.sandbox` explains it."""
