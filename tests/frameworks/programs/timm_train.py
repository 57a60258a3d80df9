"""timm: its models, losses, optimizers and schedules, in a loop like that of its train.py.

The wheel does not contain that script.
"""

import timm
import timm.loss
import timm.optim
import timm.scheduler
import torch

torch.manual_seed(0)
for name in ("test_vit", "test_convnext"):
    model = (
        timm.create_model(name, num_classes=4, pretrained=False, img_size=32)
        if (name == "test_vit")
        else timm.create_model(name, num_classes=4, pretrained=False)
    )
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3)
    scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=2, warmup_epochs=1)
    train_loss = timm.loss.LabelSmoothingCrossEntropy(0.1)
    compiled = torch.compile(model)
    for epoch in range(2):
        model.train()
        loss = train_loss(compiled(torch.randn(4, 3, 32, 32)), torch.tensor([0, 1, 2, 3]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(epoch + 1)
        print("loss", loss.item().hex())
    model.eval()
    with torch.inference_mode():
        print("loss", compiled(torch.ones(4, 3, 32, 32)).sum().item().hex())
