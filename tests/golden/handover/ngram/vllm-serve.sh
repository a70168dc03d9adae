#!/bin/sh
exec vllm serve org/model \
    --speculative-config '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_min":2,"prompt_lookup_max":4}' \
    --port 8000
