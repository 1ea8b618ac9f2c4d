"""What ``vllm-exl3 bench load`` and ``bench serve`` measure: stock ``vllm serve`` in a process of its own."""
