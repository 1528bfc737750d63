"""What to attend to: one method a file, and their names."""

from hf_hisparse.algorithms.base import KeyScoring, SparseAlgorithm
from hf_hisparse.algorithms.dsa import LightningIndexer
from hf_hisparse.algorithms.quest import Quest
from hf_hisparse.algorithms.rabitq import RaBitQ


ALGORITHMS: dict[str, type[KeyScoring]] = {"quest": Quest, "rabitq": RaBitQ}
"""The training-free algorithms, by the name that `algorithm=` takes."""

__all__ = ["ALGORITHMS", "KeyScoring", "LightningIndexer", "Quest", "RaBitQ", "SparseAlgorithm"]
