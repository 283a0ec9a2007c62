"""Teacher and student are asked for the same forward pass, or L_ret would not be 0 at the start."""

from dataclasses import replace
from pathlib import Path
from typing import Any, override

import pytest
import torch
from made.manifests import make_manifest

from craftcli.cache.build.build import build_cache
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.requests import feature_request
from craftcli.choices import Images, Kind, Layout, LossKind, Mode, Pooling
from craftcli.config.cache import CacheConfig
from craftcli.engine.retention.anchors import AnchorSet
from craftcli.engine.retention.imitation import Imitation
from craftcli.policies.base import Batch, FeatureRequest, Features, Policy
from craftcli.policies.families.pi0_fast import Pi0FastAdapter


class RecordingAdapter(Pi0FastAdapter):
    """Keeps every request for a forward pass."""

    def __init__(self) -> None:
        self.requests: list[FeatureRequest] = []

    @override
    def features(self, policy: Policy, batch: Batch, request: FeatureRequest) -> Features:
        self.requests.append(request)
        return super().features(policy, batch, request)


@pytest.mark.parametrize("kind", ["hidden", "action", "hidden+action", "hidden+action+token_ce"])
def test_teacher_and_student_get_the_same_request(
    kind: str, teacher: Any, old_data: Any, tmp_path: Path
) -> None:
    of_teacher, of_student = RecordingAdapter(), RecordingAdapter()
    config = CacheConfig(
        output=tmp_path / "a.zarr", kind=kind, samples=4, device="cpu", images=Images.EMBED
    )
    build_cache(
        config,
        replace(teacher, adapter=of_teacher),
        old_data,
        on_plan=lambda _: None,
        on_rows=lambda _: None,
    )
    kinds = [Kind(name) for name in kind.split("+")]
    modes = [Mode(name) for name in kind.split("+")]
    anchors = AnchorSet(CacheReader.open(tmp_path / "a.zarr"), batch_size=4, seed=0, kinds=kinds)
    student = Imitation(modes, anchors, teacher.policy, of_student, loss=LossKind.NMSE)
    with torch.no_grad():
        student.losses(0)
    assert set(of_teacher.requests) == set(of_student.requests)
    assert len(set(of_student.requests)) == 1


def test_only_what_is_compared_is_requested() -> None:
    manifest = make_manifest(stack="vlm", layers=(2, 3), pooling=Pooling.ACTION_TOKENS)
    hidden = FeatureRequest(stack="vlm", layers=(2, 3), with_actions=True)
    assert feature_request(manifest, [Kind.HIDDEN]) == hidden
    for kind in (Kind.ACTION, Kind.TOKEN_CE):
        assert feature_request(manifest, [kind]) == FeatureRequest(stack="vlm", output=True)
        assert feature_request(manifest, [Kind.HIDDEN, kind]) == replace(hidden, output=True)


def test_a_pooling_of_the_prefix_needs_no_actions() -> None:
    manifest = make_manifest(pooling=Pooling.VISION_TEXT, layout="sbd")
    request = feature_request(manifest, [Kind.HIDDEN])
    assert not request.with_actions
    assert request.layout is Layout.SBD
