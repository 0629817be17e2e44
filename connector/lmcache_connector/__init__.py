"""The vLLM plug-in: the only code of the project that imports vllm."""
