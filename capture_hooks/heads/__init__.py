"""Draft heads: what one is, and its checkpoint as every library reads it."""

from .contract import DraftHead, HeadProvider, StepSums, TargetReadout, TrainBatch
from .describe import HeadDescription, inspect_head
from .engines import EngineStatement
from .loading import load_head
from .readout import readout_of
from .saving import SaveReport, save_head
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
