#!/bin/sh
exec vllm serve org/model \
    --port 8000
