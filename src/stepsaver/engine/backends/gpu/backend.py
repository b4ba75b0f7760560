"""Torch's operations on a graphics card, with what torch may choose there pinned down."""

import torch
from torch import Tensor

from stepsaver.engine.backends.backend import Backend, Upload
from stepsaver.engine.backends.gpu.upload import OneCopy


class Gpu(Backend):
    def upload(self, device: torch.device) -> Upload:
        return OneCopy(device)

    def begin(self) -> None:
        """Products are summed in 32 bits. Torch's default sums float16 in 16 bits where cuBLAS likes to."""
        products = torch.backends.cuda.matmul
        products.allow_fp16_reduced_precision_reduction = False
        products.allow_bf16_reduced_precision_reduction = False
        torch.set_float32_matmul_precision("highest")

    def wait(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def mix(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Torch's memory-efficient attention, which takes masks and is on every card: asked for by name, so that torch
        neither falls back to its slow formulas nor plans anew for every shape (cuDNN). It has no float64.
        """
        if queries.dtype == torch.float64:
            return super().mix(queries, keys, values, mask)
        return torch.ops.aten._scaled_dot_product_efficient_attention(queries, keys, values, mask, False)[0]


GPU = Gpu()
