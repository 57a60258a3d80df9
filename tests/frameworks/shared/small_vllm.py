"""A model that is small enough for a test, served by vLLM offline."""

import os

import torch
from transformers import LlamaConfig

LLAMA = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def serve(model_class, config, **engine):
    """Save a random model, generate a few tokens with it, and print them.

    The tokens of a request come with the log-probabilities of the likeliest two.
    """
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    torch.manual_seed(0)
    model_class(config).to(torch.bfloat16).save_pretrained("model")
    llm = LLM(
        "model",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        **engine,
    )
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, detokenize=False)
    requests = [{"prompt_token_ids": [1 + number, 2, 3]} for number in range(3)]
    for request, output in enumerate(llm.generate(requests, params, use_tqdm=False)):
        tokens = output.outputs[0]
        likely = [
            [[token, each.logprob.hex()] for token, each in sorted(at.items())]
            for at in tokens.logprobs
        ]
        print("loss", request, list(tokens.token_ids), likely)
