"""Captures on disk: one safetensors file, whole or not there at all."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lens_rope.errors import CaptureFileError, OutputError
from lens_rope.records import LayerCapture, LayerCheck, ModelInfo, Prompt, RotaryCapture
from lens_rope.spec import LayerRope

if TYPE_CHECKING:
    import torch

FORMAT = "lens-rope-capture/1"


def save_capture(capture: RotaryCapture, path: str | Path) -> Path:
    """Writes a capture to one safetensors file.

    The file is written beside its name and renamed when it is whole, so a reader never sees half.

    Args:
        capture: What to save.
        path: The file; it is replaced when it exists.

    Returns:
        The path.

    Raises:
        OutputError: The file cannot be written.
    """
    path = Path(path)
    tensors: dict[str, torch.Tensor] = {}
    records: list[list[dict[str, Any]]] = []
    for p, layers in enumerate(capture.records):
        records.append([])
        for record in layers:
            layer = record.rope.layer
            tensors[f"{p}.{layer}.q"], tensors[f"{p}.{layer}.k"] = record.q, record.k
            if record.sinks is not None:
                tensors[f"{p}.{layer}.sinks"] = record.sinks
            rope = {**asdict(record.rope), "inv_freq": record.rope.inv_freq.tolist()}
            rope["inv_freq_error"] = record.rope.inv_freq_error.tolist()
            records[-1].append(
                {
                    "rope": rope,
                    "scale": record.scale,
                    "softcap": record.softcap,
                    "check": asdict(record.check),
                }
            )
    header = {
        "format": FORMAT,
        "model": asdict(capture.model),
        "prompts": [asdict(prompt) for prompt in capture.prompts],
        "layer_indices": capture.layer_indices,
        "records": records,
    }
    if not path.name or path.is_dir():
        raise OutputError(f"{str(path)!r} is a folder; give the name of a file in it")
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, aside, metadata={"lens_rope": json.dumps(header)})
        os.replace(aside, path)
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"cannot write {path}: {error}; choose a folder that exists and can be written to"
        ) from error
    finally:
        aside.unlink(missing_ok=True)
    return path


def load_capture(path: str | Path) -> RotaryCapture:
    """Reads a capture back.

    Args:
        path: A file written by `save_capture`.

    Raises:
        CaptureFileError: The file is missing, truncated, not a capture, or of another version.
    """
    path = Path(path)
    if not path.is_file():
        raise CaptureFileError(f"there is no capture at {path}; check the path")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("lens_rope", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise CaptureFileError(f"{path} is not a whole capture ({error}); save it again") from error
    if header.get("format") != FORMAT:
        raise CaptureFileError(
            f"{path} has format {header.get('format')!r}, this version reads {FORMAT!r}; "
            "capture again"
        )
    try:
        return _capture(header, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CaptureFileError(f"{path} is damaged ({error}); save it again") from error


def _capture(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> RotaryCapture:
    prompts = tuple(
        Prompt(**{**p, "token_ids": tuple(p["token_ids"]), "tokens": tuple(p["tokens"])})
        for p in header["prompts"]
    )
    records = []
    for p, layers in enumerate(header["records"]):
        row = []
        for item in layers:
            rope: dict[str, Any] = dict(item["rope"])
            for name in ("inv_freq", "inv_freq_error"):
                rope[name] = np.array(rope[name])
            check = {**item["check"], "head_residual": tuple(item["check"]["head_residual"])}
            at = f"{p}.{rope['layer']}"
            row.append(
                LayerCapture(
                    rope=LayerRope(**rope),
                    q=tensors[f"{at}.q"],
                    k=tensors[f"{at}.k"],
                    scale=item["scale"],
                    softcap=item["softcap"],
                    sinks=tensors.get(f"{at}.sinks"),
                    check=LayerCheck(**check),
                )
            )
        records.append(tuple(row))
    return RotaryCapture(
        model=ModelInfo(**header["model"]),
        prompts=prompts,
        layer_indices=tuple(header["layer_indices"]),
        records=tuple(records),
    )
