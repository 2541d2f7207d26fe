"""Engines that decode semantic IDs. Only ``service/engine/vllm*`` imports vllm."""
