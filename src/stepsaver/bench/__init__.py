"""Measuring: experiments, runs, results, and the speed of this machine."""
