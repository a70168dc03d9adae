#!/bin/sh
exec vllm serve org/model \
    --speculative-config '{"method":"suffix","num_speculative_tokens":2,"suffix_decoding_max_tree_depth":64,"suffix_decoding_max_cached_requests":10000,"suffix_decoding_max_spec_factor":8.0,"suffix_decoding_min_token_prob":0.1}' \
    --port 8000
