"""Draft heads: what one is, and its checkpoint as every library reads it."""

from .contract import DraftHead, HeadProvider, StepSums, TargetReadout, TrainBatch

__all__ = ["DraftHead", "HeadProvider", "StepSums", "TargetReadout", "TrainBatch"]
