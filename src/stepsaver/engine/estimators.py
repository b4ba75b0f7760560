"""How a log-likelihood can be estimated: by the decode loop, or by one forward. Imports only `typing`, for `--help`."""

from typing import Literal, get_args

Estimator = Literal["trajectory", "reference", "autoregressive"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
