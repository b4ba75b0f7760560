"""What `import stepsaver` offers: a model that generates and scores, and comparisons of ways to decode."""
