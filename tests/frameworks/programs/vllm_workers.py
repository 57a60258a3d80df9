"""vLLM: a Llama on two workers that share each layer (tensor parallelism)."""

import os

from small_vllm import LLAMA, serve
from transformers import LlamaForCausalLM

if __name__ == "__main__":
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    serve(LlamaForCausalLM, LLAMA, tensor_parallel_size=2)
