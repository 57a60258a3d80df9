"""A Llama that is small enough for a test. Programs share this module, as users' programs do."""

from transformers import LlamaConfig, LlamaForCausalLM


def small_llama(**changes):
    config = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**config, **changes}))
