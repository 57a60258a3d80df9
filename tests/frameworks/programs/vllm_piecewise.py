"""vLLM: a Llama in pieces, as vLLM compiles it for a GPU."""

import os

from small_vllm import LLAMA, serve
from transformers import LlamaForCausalLM

if __name__ == "__main__":
    os.environ["PIECEWISE_CPU"] = "1"
    serve(LlamaForCausalLM, LLAMA)
