#!/usr/bin/env python3
"""Hugging Face's own `safetensors` opens what a run saves and sees every tensor. When it is not installed, it comes from
PyPI into build/test_venv; without a network the test is skipped."""
# ctest: TIMEOUT 300
# builds: release

import json
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
import pypi  # noqa: E402
from training import TrainingCase  # noqa: E402


class Safetensors(TrainingCase):
    def test_sees_every_tensor(self):
        import numpy
        from safetensors import safe_open

        weights, _ = self.train("--steps", 2, "--save-every", 1, "--out", self.folder / "out")
        folder = self.folder / "out" / "checkpoint-2"
        listed = {entry["name"]: entry for entry in json.loads((folder / "manifest.json").read_text())["files"]}
        shapes = {}
        for name in ("model.safetensors", "optimizer.safetensors"):
            with safe_open(folder / name, framework="np") as file:
                self.assertEqual(sorted(file.keys()), sorted(tensor["name"] for tensor in listed[name]["tensors"]))
                for key in file.keys():
                    tensor = file.get_tensor(key)
                    self.assertEqual(tensor.dtype, numpy.float32)
                    self.assertTrue(numpy.isfinite(tensor).all())
                    shapes[key] = tensor.shape
        self.assertEqual(shapes["model.embed_tokens.weight"], (256, 32))
        self.assertEqual(shapes["model.norm.weight"], (32,))
        self.assertEqual(shapes["exp_avg.model.layers.0.mlp.up_proj.weight"], (48, 32))
        self.assertEqual(len(shapes), 33)

    def test_starts_from_what_others_save(self):
        """The same weights as safetensors writes them, in half precision and in two files: the run starts from them."""
        import numpy
        from safetensors.numpy import load_file, save_file

        out = self.folder / "out"
        self.train("--steps", 2, "--out", out)
        tensors = load_file(out / "model.safetensors")
        halves = {name: tensor.astype(numpy.float16) for name, tensor in tensors.items()}
        widened = {name: tensor.astype(numpy.float32) for name, tensor in halves.items()}
        hashes = set()
        for form, parts in (("f32", [widened]), ("f16", [halves]), ("sharded", [dict(list(halves.items())[i::2]) for i in (0, 1)])):
            folder = self.folder / form
            folder.mkdir()
            (folder / "config.json").write_text((out / "config.json").read_text())
            if len(parts) == 1:
                save_file(parts[0], folder / "model.safetensors")
            else:
                index = {}
                for number, part in enumerate(parts, 1):
                    name = f"model-{number:05}-of-00002.safetensors"
                    save_file(part, folder / name)
                    index.update(dict.fromkeys(part, name))
                (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
            hashes.add(self.train("--steps", 2, "--init", folder)[0])
        self.assertEqual(len(hashes), 1)


if __name__ == "__main__":
    pypi.need("safetensors", "numpy")
    unittest.main()
