"""vLLM: a Llama, offline."""

from small_vllm import LLAMA, serve
from transformers import LlamaForCausalLM

if __name__ == "__main__":  # vLLM starts processes
    serve(LlamaForCausalLM, LLAMA)
