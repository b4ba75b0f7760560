"""The recipe that made the embedded model: autoregressive first, then both losses in every step."""
