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
            "method": "suffix",
            "num_speculative_tokens": 2,
            "suffix_decoding_max_tree_depth": 64,
            "suffix_decoding_max_cached_requests": 10000,
            "suffix_decoding_max_spec_factor": 8.0,
            "suffix_decoding_min_token_prob": 0.1,
        },
    },
    deployment_config={"num_replicas": 1},
)

app = build_openai_app({"llm_configs": [config]})
