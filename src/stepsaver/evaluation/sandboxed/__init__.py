"""What runs inside the sandbox, with the standard library only: `stepsaver.evaluation.sandbox` says how it fits."""
