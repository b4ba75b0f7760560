"""The engine's network in training: the same parts, but attention is over units instead of caches."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stepsaver.engine.models.config import ModelConfig
from stepsaver.engine.models.rope import Rotation
from stepsaver.engine.models.transformer import Layer, Transformer
from training.layout import NO_TARGET, Units


class Losses(NamedTuple):
    """Mean loss per weight in nats, and the share of the weighted rows whose best guess is right."""

    autoregressive: Tensor
    diffusion: Tensor
    autoregressive_right: Tensor
    diffusion_right: Tensor


def initial_model(config: ModelConfig, *, seed: int, deviation: float) -> Transformer:
    """Returns a model with normal weights; those that write to the residual stream are scaled down with the depth, and
    biases are zero.
    """
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" not in name:
                writes = name.endswith(("attention.output.weight", "mlp.down.weight"))
                scale = deviation / (2 * config.layers) ** 0.5 if writes else deviation
                parameter.normal_(0.0, scale, generator=generator)
    return model


def unit_layer(layer: Layer, h_URD: Tensor, rotation: Rotation, context_UC: Tensor, mask: Tensor) -> Tensor:
    """Runs one layer over units: the keys and values of a unit's context slots are put one after another."""
    queries, keys, values = layer.attention.project_rotated(h_URD, rotation)
    mixed = F.scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys[context_UC].flatten(1, 2).transpose(1, 2),
        values[context_UC].flatten(1, 2).transpose(1, 2),
        attn_mask=mask,
    )
    h_URD = h_URD + layer.attention.finish(mixed.transpose(1, 2).flatten(-2))
    return h_URD + layer.mlp(h_URD)


# Static shapes: a stage has one size, and a step compiled for any size is several times slower here.
compiled_unit_layer = torch.compile(unit_layer, dynamic=False)


def unit_logits(model: Transformer, units: Units, *, compiled: bool = False) -> Tensor:
    """Returns the logits of every row of every unit: [U, R, V]."""
    table = model.rotations(int(units.positions_UR.max()) + 1)
    rotation = table[units.positions_UR]
    mask = units.mask()
    run = compiled_unit_layer if compiled else unit_layer
    h_URD = model.embedding(units.tokens_UR)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        h_URD = run(layer, h_URD, rotation, units.context_UC, mask)
    return model.logits(h_URD)


def losses(model: Transformer, units: Units, *, compiled: bool = False) -> Losses:
    logits_URV = unit_logits(model, units, compiled=compiled)
    rows = F.cross_entropy(
        logits_URV.flatten(0, 1).float(), units.targets_UR.flatten(), ignore_index=NO_TARGET, reduction="none"
    ).view_as(units.weights_UR)
    right = (logits_URV.detach().argmax(-1) == units.targets_UR).float()
    causal = units.causal_U[:, None]
    causal_weights, other_weights = units.weights_UR * causal, units.weights_UR * ~causal
    causal_total, other_total = causal_weights.sum().clamp(min=1e-9), other_weights.sum().clamp(min=1e-9)
    return Losses(
        (rows * causal_weights).sum() / causal_total,
        (rows * other_weights).sum() / other_total,
        (right * causal_weights).sum() / causal_total,
        (right * other_weights).sum() / other_total,
    )
