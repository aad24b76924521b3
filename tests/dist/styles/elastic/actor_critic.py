"""Advantage actor-critic on a cart that is to be kept in the middle; an example is an episode."""

import torch
from torch import nn
from torch.distributions import Normal
from torch.utils.data import Dataset

import hvd_elastic.torch as hvd

EPOCHS = 5
WIDTH = 16
LENGTH = 6
GAMMA, ENTROPY, TAU = 0.95, 1e-3, 0.1


class Episodes(Dataset):
    """The start of an episode, and the dice of its actions."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(index)
        return torch.randn(2, generator=random), torch.randn(LENGTH, generator=random)


def network():
    return nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def play(actor, start, dice):
    """Returns what was seen, done and earned: (length, episodes, ...)."""
    states, actions, rewards = [start], [], []
    with torch.no_grad():
        for noise in dice.T:
            place, speed = states[-1].T
            action = actor(states[-1])[:, 0] + 0.3 * noise
            speed = speed + 0.2 * action
            states.append(torch.stack([place + 0.2 * speed, speed], 1))
            actions.append(action)
            rewards.append(-states[-1].square().sum(1) - 0.01 * action.square())
    return torch.stack(states), torch.stack(actions), torch.stack(rewards)


def main():
    hvd.init()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    actor, critic, target = network(), network(), network()
    target.load_state_dict(critic.state_dict())
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
    hvd.DistributedOptimizer(actor_optimizer, actor)
    hvd.DistributedOptimizer(critic_optimizer, critic)
    loader = hvd.DataLoader(Episodes(), batch_size=12, shuffle=True)

    @hvd.run
    def train(state):
        for _ in hvd.epochs(EPOCHS):
            for start, dice in loader:
                states, actions, rewards = play(actor, start, dice)
                with torch.no_grad():
                    wanted = rewards + GAMMA * target(states[1:])[..., 0]
                values = critic(states[:-1])[..., 0]
                critic_optimizer.zero_grad()
                nn.functional.mse_loss(values, wanted).backward()
                critic_optimizer.synchronize()
                nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
                critic_optimizer.step()

                policy = Normal(actor(states[:-1])[..., 0], 0.3)
                advantage = wanted - values.detach()
                loss = -(policy.log_prob(actions) * advantage + ENTROPY * policy.entropy()).mean()
                actor_optimizer.zero_grad()
                loss.backward()
                actor_optimizer.step()

                with torch.no_grad():
                    for ours, theirs in zip(target.parameters(), critic.parameters()):
                        ours.lerp_(theirs, TAU)
                state.episodes += 12

    train(
        hvd.State(
            actor=actor,
            critic=critic,
            target=target,
            actor_optimizer=actor_optimizer,
            critic_optimizer=critic_optimizer,
            episodes=0,
        )
    )
    return actor


if __name__ == "__main__":
    main()
