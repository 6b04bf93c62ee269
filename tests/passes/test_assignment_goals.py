"""Assignment to a budget, by measured damage, and by a function of the user's."""

import math
import random

import numpy as np
import pytest
from counted_tensors import groups_of, mlp
from in_force import in_force

from fxprec.errors import BudgetError, ConfigError
from fxprec.passes.analysis.assignment import Assignment, assign
from fxprec.passes.analysis.saved_bytes import SavedBytes


class TestBudget:
    """Saved of ``mlp()``: outputs and parameters, 606 elements; 2 bytes each in bf16, 1 in fp8."""

    SAVED = 80 + 128 + 160 + 160 + 48 + 30

    def assign(self, budget: object, **options: object) -> Assignment:
        return assign(mlp(), in_force(recipe="fp8", activation_budget=budget, **options))

    def test_groups_are_demoted_in_policy_order_until_the_bytes_fit(self):
        high = 2 * self.SAVED
        freed = {0: 80 + 128, 1: 160 + 160 + 48, 2: 30}
        assert self.assign(high).low_groups == frozenset()
        assert self.assign(high - 1).low_groups == {1}
        assert self.assign(high - freed[1]).low_groups == {1}
        assert self.assign(high - freed[1] - 1).low_groups == {0, 1}
        assert self.assign(self.SAVED).low_groups == {0, 1, 2}
        assert self.assign(high - 1, policy="size-ascending").low_groups == {2}

    def test_what_it_predicts_is_reported(self):
        result = self.assign(2 * self.SAVED - 1)
        assert result.saved.fp32 == 4 * self.SAVED
        assert result.saved.planned == 2 * self.SAVED - (160 + 160 + 48)
        assert result.warnings == ()

    def test_an_impossible_budget_names_the_least_and_the_ways_out(self):
        with pytest.raises(BudgetError) as caught:
            self.assign(self.SAVED - 1)
        assert str(caught.value) == (
            "activation_budget is 605 bytes, but with recipe 'fp8' and policy 'size' what is saved for backward takes "
            "at least 606 bytes; raise the budget to that or take a smaller batch"
        )
        with pytest.raises(BudgetError, match="take a smaller batch or keep less high"):
            self.assign(self.SAVED, keep_high=("fc2",))
        with pytest.raises(BudgetError, match=r"policy 'operator' .* or choose policy 'size'"):
            self.assign(self.SAVED, policy="operator")
        with pytest.raises(BudgetError, match=r"choose a recipe with a low format \('bf16' has none\)"):
            assign(mlp(), in_force(recipe="bf16", activation_budget=self.SAVED))
        with pytest.raises(BudgetError, match="policy 'exact'"):
            assign(mlp(), in_force(recipe="fp8", policy="exact", activation_budget=1), damage={})

    def test_measured_bytes_replace_the_prediction(self):
        measured = SavedBytes(high={5: 1000}, low={5: 400}, fixed=50)
        result = assign(mlp(), in_force(recipe="fp8", activation_budget=450), saved_bytes=measured)
        assert result.low_groups == {1}
        assert result.saved.planned == 450
        with pytest.raises(BudgetError, match="at least 450 bytes"):
            assign(mlp(), in_force(recipe="fp8", activation_budget=449), saved_bytes=measured)

    def test_exact_frees_the_bytes_at_the_least_damage(self):
        damage = {5: 1.0, 0: 0.1, 1: 0.1, 9: 0.05}
        config = in_force(recipe="fp8", policy="exact", activation_budget=2 * self.SAVED - 200)
        result = assign(mlp(), config, damage=damage)
        assert result.low_groups == {0}, "208 bytes for 0.2, where group 1 frees 368 for 1.0"
        assert result.gap == 0.0


class TestExact:
    def damage_of(self, low: frozenset[int], damage: dict[int, float]) -> float:
        return math.fsum(damage[i] for i in low)

    def test_it_is_never_worse_than_size_on_its_own_objective(self):
        rng = random.Random(2)
        better = 0
        for _ in range(40):
            tensors = groups_of([rng.randint(8, 10**6) for _ in range(25)])
            damage = {t.id: 10 ** rng.uniform(-9, 0) for t in tensors}
            ratio = rng.randint(1, 9) / 10
            exact, size = (
                assign(tensors, in_force(recipe="hfp8", policy=p, low_ratio=ratio), damage=damage)
                for p in ("exact", "size")
            )
            assert exact.achieved_ratio >= ratio
            assert exact.gap == 0.0
            assert self.damage_of(exact.low, damage) <= self.damage_of(size.low, damage)
            better += self.damage_of(exact.low, damage) < 0.5 * self.damage_of(size.low, damage)
        assert better > 20

    def test_with_equal_damage_per_group_it_demotes_as_few_groups_as_size(self):
        rng = random.Random(4)
        for _ in range(40):
            tensors = groups_of([rng.randint(8, 10**6) for _ in range(20)])
            damage = {t.id: 0.25 for t in tensors}
            ratio = rng.random()
            exact, size = (
                assign(tensors, in_force(recipe="fp8", policy=p, low_ratio=ratio), damage=damage)
                for p in ("exact", "size")
            )
            assert len(exact.low_groups) == len(size.low_groups)

    def test_what_is_kept_high_does_no_damage(self):
        damage = dict.fromkeys(range(11), 1.0) | {3: 1000.0}
        free = assign(mlp(), in_force(recipe="fp8", policy="exact", low_ratio=0.3), damage=damage)
        held = assign(mlp(), in_force(recipe="fp8", policy="exact", low_ratio=0.4, keep_high=("fc1",)), damage=damage)
        assert free.low_groups == {0, 2}
        assert held.low_groups == {0, 1}, "without fc1's output, group 1 is harmless"
        assert 3 not in held.low

    def test_without_damages_it_says_what_to_pass(self):
        with pytest.raises(ConfigError) as caught:
            assign(mlp(), in_force(recipe="fp8", policy="exact", low_ratio=0.5))
        assert str(caught.value) == (
            "policy 'exact' needs the damage of each tensor, and none was measured; pass damage= (one calibration "
            "batch measures it), or choose policy 'size'"
        )


class TestPolicyFunction:
    def test_the_groups_it_returns_are_low(self):
        def odd_groups(tensors, config):
            assert config.recipe == "fp8"
            return {t.group for t in tensors if t.group % 2}

        result = assign(groups_of([4] * 5), in_force(recipe="fp8", policy=odd_groups))
        assert result.low_groups == {1, 3}
        assert sorted(result.order) == [0, 1, 2, 3, 4]
        assert result.policy.endswith("odd_groups")

    def test_its_order_is_kept_and_numpy_ids_are_ids(self):
        result = assign(groups_of([4] * 3), in_force(recipe="fp8", policy=lambda t, c: np.array([2, 0])))
        assert result.order == {2: 0, 0: 1, 1: 2}
        assert result.low_groups == {0, 2}

    @pytest.mark.parametrize(
        ("returned", "words"),
        [
            (None, "returned None; let it return a collection of group ids, 0 to 2"),
            (3, "returned 3; let it return a collection"),
            ("01", "returned '01'; let it return a collection"),
            ([0, 3], "returned 3, which is not a group; let it return a collection of group ids, 0 to 2"),
            ([-1], "returned -1, which is not a group"),
            ([True], "returned True, which is not a group"),
            ([1.0], "returned 1.0, which is not a group"),
            ([[0]], r"returned [0], which is not a group"),
        ],
    )
    def test_what_is_no_set_of_groups_is_refused(self, returned, words):
        def bad(tensors, config):
            return returned

        with pytest.raises(ConfigError) as caught:
            assign(groups_of([4] * 3), in_force(recipe="fp8", policy=bad))
        assert "policy " in str(caught.value)
        assert ".bad " in str(caught.value)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_what_it_raises_is_told_in_one_line(self):
        def bad(tensors, config):
            raise ValueError("no\nsuch")

        words = r"^policy .*\.bad raised ValueError: no such; it is called as f\(tensors, config\)$"
        with pytest.raises(ConfigError, match=words):
            assign(groups_of([4] * 3), in_force(recipe="fp8", policy=bad))
