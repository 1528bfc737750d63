"""What to attend to: one method a file, and their names."""

from hf_hisparse.algorithms.base import KeyScoring, SparseAlgorithm
from hf_hisparse.algorithms.dsa import LightningIndexer
from hf_hisparse.algorithms.quest import Quest
from hf_hisparse.algorithms.rabitq import RaBitQ


ALGORITHMS: dict[str, type[KeyScoring]] = {"quest": Quest, "rabitq": RaBitQ}
"""The training-free algorithms, by the name that `algorithm=` takes."""

AUTO = "rabitq"
"""What `algorithm="auto"` means for a model with no indexer of its own: the better at equal GPU bytes, as measured in
eval/results/selection.json and eval/results/needle.json."""

__all__ = ["ALGORITHMS", "AUTO", "KeyScoring", "LightningIndexer", "Quest", "RaBitQ", "SparseAlgorithm"]
