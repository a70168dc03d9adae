#!/bin/sh
exec vllm serve org/model \
    --speculative-config '{"method":"eagle3","model":"org/head","num_speculative_tokens":3}' \
    --tensor-parallel-size 2 \
    --pipeline-parallel-size 2 \
    --data-parallel-size 3 \
    --port 8000
