"""vLLM: the command that starts it, a Kubernetes manifest, and a Ray Serve app."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from foredraft.handover.plan import PORT, Handover, is_local, options

_NAME = re.compile(r"[^a-z0-9]+")


def command(plan: Handover) -> list[str]:
    """`vllm serve`, as a list of arguments. Sizes of 1, which are vLLM's defaults, are left out."""
    return ["vllm", "serve", plan.model, *arguments(plan)]


def arguments(plan: Handover) -> list[str]:
    """What follows the model."""
    sizes = plan.parallel
    return options(
        {
            "--served-model-name": plan.name if plan.name != plan.model else None,
            "--speculative-config": compact(plan.config) if plan.config is not None else None,
            "--tensor-parallel-size": sizes.tensor if sizes.tensor > 1 else None,
            "--pipeline-parallel-size": sizes.pipeline if sizes.pipeline > 1 else None,
            "--data-parallel-size": sizes.data if sizes.data > 1 else None,
            "--port": PORT,
        }
    )


def compact(config: dict[str, Any]) -> str:
    """A configuration in one line."""
    return json.dumps(config, separators=(",", ":"))


# Kubernetes


def manifest(plan: Handover) -> str:
    """A Deployment and a Service, as YAML. Copies (data parallel) are replicas, so that one may fail alone.

    A model that lies in a folder here is mounted from the same path of the node; put it on each node, or change the
    volume.
    """
    name = _NAME.sub("-", Path(plan.name).name.lower()).strip("-")[:50] or "model"
    one = replace(plan, parallel=replace(plan.parallel, data=1))
    passed = [plan.model, *arguments(one)]
    folders = sorted({str(Path(each).expanduser().resolve()) for each in _references(plan) if is_local(each)})
    mounts = "".join(_MOUNT.format(i=i, path=_text(folder)) for i, folder in enumerate(folders))
    volumes = "".join(_VOLUME.format(i=i, path=_text(folder)) for i, folder in enumerate(folders))
    return _MANIFEST.format(
        name=name,
        replicas=plan.parallel.data,
        image=_text(f"vllm/vllm-openai:v{plan.version}.0"),
        arguments="".join(f"            - {_text(each)}\n" for each in passed),
        port=PORT,
        devices=plan.parallel.devices,
        mounts=mounts,
        volumes=volumes,
    )


def _references(plan: Handover) -> list[str]:
    model = (plan.config or {}).get("model")
    return [plan.model, *([model] if isinstance(model, str) else [])]


def _text(value: str) -> str:
    """A string as YAML has it: JSON's are strings there too."""
    return json.dumps(value)


_MOUNT = "            - {{name: files-{i}, mountPath: {path}, readOnly: true}}\n"
_VOLUME = "        - {{name: files-{i}, hostPath: {{path: {path}, type: Directory}}}}\n"
_MANIFEST = """\
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {name}
  labels: {{app: {name}}}
spec:
  replicas: {replicas}
  selector:
    matchLabels: {{app: {name}}}
  template:
    metadata:
      labels: {{app: {name}}}
    spec:
      containers:
        - name: vllm
          image: {image}
          args:
{arguments}          ports:
            - {{name: http, containerPort: {port}}}
          resources:
            limits: {{nvidia.com/gpu: {devices}}}
          startupProbe:  # loading and compiling may take half an hour
            httpGet: {{path: /health, port: http}}
            periodSeconds: 10
            failureThreshold: 180
          readinessProbe:
            httpGet: {{path: /health, port: http}}
            periodSeconds: 5
          livenessProbe:
            httpGet: {{path: /health, port: http}}
            periodSeconds: 10
            failureThreshold: 6
          volumeMounts:
            - {{name: shared-memory, mountPath: /dev/shm}}
            - {{name: cache, mountPath: /root/.cache}}
{mounts}      volumes:
        - {{name: shared-memory, emptyDir: {{medium: Memory}}}}
        - {{name: cache, emptyDir: {{}}}}
{volumes}---
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  selector: {{app: {name}}}
  ports:
    - {{name: http, port: {port}, targetPort: http}}
"""


# Ray


def ray_app(plan: Handover) -> str:
    """A Ray Serve app as a Python file: `serve run ray_app:app` starts it. Copies (data parallel) are replicas."""
    engine: dict[str, Any] = {
        "tensor_parallel_size": plan.parallel.tensor,
        "pipeline_parallel_size": plan.parallel.pipeline,
    }
    if plan.config is not None:
        engine["speculative_config"] = plan.config
    loading = {"model_id": plan.name, "model_source": plan.model}
    return _RAY_APP.format(
        loading=_python(loading),
        engine=_python(engine),
        accelerator=f"    accelerator_type={json.dumps(plan.gpu)},\n" if plan.gpu is not None else "",
        replicas=plan.parallel.data,
    )


def _python(value: Any, depth: int = 1) -> str:
    """A plain value as Python writes it, strings in double quotes, tables an entry a line."""
    if not isinstance(value, dict):
        return json.dumps(value) if isinstance(value, str) else repr(value)
    inner = "    " * (depth + 1)
    lines = "".join(f"{inner}{json.dumps(name)}: {_python(each, depth + 1)},\n" for name, each in value.items())
    return f"{{\n{lines}{'    ' * depth}}}"


_RAY_APP = '''\
"""A Ray Serve app with speculative decoding: `pip install "ray[serve,llm]" vllm`, then `serve run ray_app:app`."""

from ray.serve.llm import LLMConfig, build_openai_app

config = LLMConfig(
    model_loading_config={loading},
    engine_kwargs={engine},
{accelerator}    deployment_config={{"num_replicas": {replicas}}},
)

app = build_openai_app({{"llm_configs": [config]}})
'''
