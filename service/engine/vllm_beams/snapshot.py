"""A version of the catalogue as the worker holds it, and searches over it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gti_core.decoding.device import DeviceIndex

from gti_core.decoding.constraint import ConstraintIndex
from gti_core.vocabulary import SidVocabulary
from service.engine.vllm_beams.wire import read_snapshot


class Snapshot:
    """One version: immutable.

    Args:
        version: its number.
        vocabulary: rows and active codes.
        index: constraint index.
        device: where decoding happens.
    """

    def __init__(
        self, version: int, vocabulary: SidVocabulary, index: ConstraintIndex, device: torch.device
    ) -> None:
        self.version = version
        self.vocabulary = vocabulary
        self.index = index
        self.inactive = torch.from_numpy(~vocabulary.active_mask).to(device)
        """Rows that take no part in the softmax, [S] bool."""
        self.device = device

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Snapshot:
        """Read a file of `service.engine.vllm_beams.wire.write_snapshot`."""
        version, vocabulary, sids, available = read_snapshot(path)
        index = ConstraintIndex(sids)
        for row in np.flatnonzero(~available):
            index = index.retired(int(row))
        return cls(version, vocabulary, index, device)

    @property
    def levels(self) -> int:
        """L, codes per SID."""
        return self.index.levels


class Search:
    def __init__(self, snapshot, requests):
        from gti_core.decoding import BeamSearch
        self.snapshot=snapshot; self.requests=requests
        self.width=max(r.beam_width for r in requests)
        idx=snapshot.index
        self.s=[BeamSearch(idx, snapshot.vocabulary, idx.admissible(r.excluded), r.beam_width) for r in requests]
        self.dead=[x.done for x in self.s]
    def _sync(self):
        Q,W=len(self.s),self.width; v=self.snapshot.vocabulary
        lv=max((x.level for x in self.s), default=0)
        self.path=torch.zeros(Q,W,max(lv,1),dtype=torch.int64); self.parents=torch.zeros(Q,W,dtype=torch.int64)
        self.ok=torch.zeros(Q,W,dtype=torch.bool)
        for q,x in enumerate(self.s):
            if self.dead[q]: continue
            for w,b in enumerate(x.frontier):
                self.path[q,w]=torch.tensor(v.token_ids(b.prefix)); self.parents[q,w]=x.parents[w]; self.ok[q,w]=True
    def advance_from_prompt(self, lp):
        for q,x in enumerate(self.s):
            if not self.dead[q]: x.advance(lp[q:q+1].numpy())
        self._sync()
    def alive(self, places): return places[self.ok.flatten()[places]]
    def advance(self, alive, lp):
        W=self.width
        for q,x in enumerate(self.s):
            if self.dead[q]: continue
            m=(alive//W)==q
            x.advance(lp[m].numpy())
        self._sync()
    def answers(self):
        out=[]
        for r,x,d in zip(self.requests,self.s,self.dead):
            t=torch.full((r.k,2),-1.0,dtype=torch.float64)
            if not d:
                for i,f in enumerate(x.results(r.k)): t[i,0]=f.row; t[i,1]=f.logprob
            out.append(t)
        return out
