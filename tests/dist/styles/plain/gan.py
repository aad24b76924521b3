# %% [markdown]
# # A GAN that learns the points of a ring
# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS = 5
WIDTH = 16
NOISE = 4
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


# %% A point of the ring, and the noise from which the generator makes another one
class Ring(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(index)
        angle = 6.28 * torch.rand((), generator=random)
        return torch.stack([angle.cos(), angle.sin()]), torch.randn(NOISE, generator=random)


# %% Models
def mlp(inputs, outputs):
    layers = nn.Linear(inputs, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(*layers, nn.LeakyReLU(0.2), nn.Linear(WIDTH, outputs))


generator, discriminator = mlp(NOISE, 2), mlp(2, 1)
opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
loader = DataLoader(Ring(), 12, shuffle=True)

# %% Training
for epoch in range(EPOCHS):
    for real, noise in loader:
        yes, no = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(noise)

        opt_d.zero_grad()
        loss_d = bce(discriminator(real), yes) + bce(discriminator(fake.detach()), no)
        loss_d.backward()
        opt_d.step()

        opt_g.zero_grad()
        loss_g = bce(discriminator(fake), yes)
        loss_g.backward()
        opt_g.step()

# %%
print("points of the ring:", generator(torch.randn(3, NOISE)).norm(dim=1).tolist())
