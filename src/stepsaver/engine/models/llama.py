"""Llama 2 and 3 and models of the same format (SmolLM, TinyLlama): autoregressive, blocks of one row."""

from stepsaver.engine.models.architecture import Architecture

ARCHITECTURE = Architecture(name="LlamaForCausalLM", attention_bias=None, output_bias=True, mask_id=None, block_size=1)
