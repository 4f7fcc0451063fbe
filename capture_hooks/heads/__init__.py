"""Draft heads: what one is, and its checkpoint as every library reads it."""

from .checkpoint import HeadDescription, SaveReport, inspect_head, load_head, save_head
from .contract import DraftHead, HeadProvider, StepSums, TargetReadout, TrainBatch
from .engines import EngineStatement
from .readout import readout_of
from .witness import HeadWarning, PointAgreement, Witness, WitnessReport, check_witness, make_witness

__all__ = [
    "DraftHead",
    "EngineStatement",
    "HeadDescription",
    "HeadProvider",
    "HeadWarning",
    "PointAgreement",
    "SaveReport",
    "StepSums",
    "TargetReadout",
    "TrainBatch",
    "Witness",
    "WitnessReport",
    "check_witness",
    "inspect_head",
    "load_head",
    "make_witness",
    "readout_of",
    "save_head",
]
