"""The router's rule, in torch: ties, padding, tables."""

from __future__ import annotations

import torch

from dsparkd.kernels.router import RouterRule, TorchRouter, bind

IDS = torch.tensor([2, 0])
TWO = torch.tensor([2])


def test_of_equal_scores_the_lower_experts_are_chosen_and_the_bias_does_not_weigh() -> None:
    """Expert 4 is chosen for its bias alone; its share follows its score."""
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0])
    routes = TorchRouter(RouterRule(5, 3, 1.5, bias, None))(torch.zeros((2, 5)), IDS, TWO)
    assert routes.expert_ids.tolist() == [[0, 1, 4]] * 2
    assert torch.allclose(routes.shares, torch.full((2, 3), 0.5))


def test_a_table_chooses_by_token_and_scores_weigh() -> None:
    """Ids come ascending, whatever order the table has."""
    table = torch.tensor([[1, 0], [3, 1], [4, 2]])
    logits = torch.tensor([[0.0, 0.0, 30.0, 0.0, 120.0]]).repeat(2, 1)
    routes = TorchRouter(RouterRule(5, 2, 3.0, None, table))(logits, IDS, TWO)
    assert routes.expert_ids.tolist() == [[2, 4], [0, 1]]
    assert torch.allclose(routes.shares[0], torch.tensor([1.0, 2.0]))  # roots of 30 and 120


def test_padding_rows_name_no_expert() -> None:
    """Their ids are one past the last."""
    rule = RouterRule(5, 3, 1.5, torch.zeros(5), None)
    routes = bind(rule, torch.device("cpu"))(torch.zeros((2, 5)), IDS, torch.tensor([1]))
    assert routes.expert_ids.tolist() == [[0, 1, 2], [5, 5, 5]]
    assert routes.expert_ids.dtype == torch.int32
