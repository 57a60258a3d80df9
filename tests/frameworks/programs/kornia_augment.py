"""kornia: filters, geometry and colours, compiled one by one and as a pipeline."""

import kornia
import torch

torch.manual_seed(0)
images = torch.rand(2, 3, 24, 24)
angle = torch.tensor([10.0, -20.0])
matrix = torch.eye(3).repeat(2, 1, 1) + 0.01 * torch.randn(2, 3, 3)

functions = {
    "gray": lambda x: kornia.color.rgb_to_grayscale(x),
    "hsv": lambda x: kornia.color.hsv_to_rgb(kornia.color.rgb_to_hsv(x)),
    "lab": lambda x: kornia.color.rgb_to_lab(x),
    "blur": lambda x: kornia.filters.gaussian_blur2d(x, (5, 5), (1.0, 1.0)),
    "median": lambda x: kornia.filters.median_blur(x, (3, 3)),
    "sobel": lambda x: kornia.filters.sobel(x),
    "laplacian": lambda x: kornia.filters.laplacian(x, 3),
    "rotate": lambda x: kornia.geometry.transform.rotate(x, angle),
    "warp": lambda x: kornia.geometry.transform.warp_perspective(x, matrix, (24, 24)),
    "resize": lambda x: kornia.geometry.transform.resize(x, (12, 12)),
    "flip": lambda x: kornia.geometry.transform.hflip(x),
    "gamma": lambda x: kornia.enhance.adjust_gamma(x, 1.2),
    "contrast": lambda x: kornia.enhance.adjust_contrast(x, 0.8),
    "ssim": lambda x: kornia.metrics.ssim(x, x.flip(-1), 5),
    "erode": lambda x: kornia.morphology.erosion(x, torch.ones(3, 3)),
    "harris": lambda x: kornia.feature.harris_response(kornia.color.rgb_to_grayscale(x)),
}
for name, function in functions.items():
    result = torch.compile(function)(images)
    print("loss", name, result.double().sum().item().hex())

augment = torch.nn.Sequential(
    kornia.enhance.Normalize(mean=torch.full((3,), 0.5), std=torch.full((3,), 0.2)),
    kornia.filters.GaussianBlur2d((3, 3), (0.5, 0.5)),
)
print("loss pipeline", torch.compile(augment)(images).double().sum().item().hex())
