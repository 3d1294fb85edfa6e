"""`tessera-export`: artifacts from the command line."""

from __future__ import annotations

from device_sdk.artifact.errors import ArtifactError
from device_sdk.system.command_line import Program
from export.errors import ExportError

main = Program(
    name="tessera-export",
    many_lines=True,
    description="""\
Turn a torch model, its loss and an optimizer into an artifact: a folder with one plain ONNX graph
for a whole training step, which stock onnxruntime runs on a device without torch.""",
    examples="""\
examples:
  tessera-export mf -o artifacts/mf              the factorisation model that ships with the SDK
  tessera-export image resnet -o artifacts/resnet --mutual
                                                 a small image network that learns from others
  tessera-export click cnn -o artifacts/cnn --attention
                                                 a click model with the distillation loss
  tessera-export build mymodels:lenet -o artifacts/lenet
                                                 your own: mymodels.py defines lenet()
  tessera-export inspect artifacts/lenet         what an artifact takes, holds and gives
  tessera-export operators                       the torch operators that can be exported
""",
    package="export.cli",
    commands={
        "mf": "export matrix factorisation with the BPR loss",
        "image": "export a small image network",
        "click": "export a click model over MovieLens's fields",
        "build": "export a model of your own",
        "inspect": "print what an artifact takes, holds and gives",
        "operators": "list the torch operators that can be exported",
    },
    errors=dict.fromkeys((ExportError, ArtifactError), "{error}"),
    extra="export",
    needs=("torch", "onnx", "sympy"),
    interrupted="interrupted; nothing was written",
)
