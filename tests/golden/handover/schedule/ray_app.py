"""A Ray Serve app with speculative decoding: `pip install "ray[serve,llm]" vllm`, then `serve run ray_app:app`."""

from ray.serve.llm import LLMConfig, build_openai_app

config = LLMConfig(
    model_loading_config={
        "model_id": "org/model",
        "model_source": "org/model",
    },
    engine_kwargs={
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
            "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 5, 2], [6, 16, 0]],
        },
    },
    deployment_config={"num_replicas": 1},
)

app = build_openai_app({"llm_configs": [config]})
