"""Write a mode of recurrent states."""

from qgate import Mode, models, modes
from qgate.modes.states.choices import StateChoice, StateChoices

scan = StateChoice("int8", "token", remainder="int4")
mode = Mode("ssm8", "the scan's state in INT8", fits="mamba", states=StateChoices(ssm=scan))
model = models.load("tiny-mamba", sampling=models.Sampling(samples=1, seqlen=64))
network = modes.apply(mode, model).model.module
