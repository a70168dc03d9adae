#!/bin/sh
exec vllm serve org/model \
    --speculative-config '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_min":2,"prompt_lookup_max":4,"num_speculative_tokens_per_batch_size":[[1,1,3],[2,5,2],[6,16,0]]}' \
    --port 8000
