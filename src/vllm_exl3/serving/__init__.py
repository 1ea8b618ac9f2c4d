"""The half that knows vLLM; no module outside this folder imports it."""
