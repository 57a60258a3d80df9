"""vLLM: an OPT, offline, compiled at its first step and not ahead of time."""

import os

from small_vllm import serve
from transformers import OPTConfig, OPTForCausalLM

CONFIG = OPTConfig(
    vocab_size=512,
    hidden_size=128,
    ffn_dim=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=64,
    word_embed_proj_dim=128,
)

if __name__ == "__main__":
    os.environ["VLLM_USE_AOT_COMPILE"] = "0"
    serve(OPTForCausalLM, CONFIG)
