#!/bin/sh
exec vllm serve org/model \
    --speculative-config '{"method":"draft_model","model":"org/small","num_speculative_tokens":4,"draft_sample_method":"probabilistic","rejection_sample_method":"block"}' \
    --port 8000
