"""The DLProfile: measurements of a model on a type of device, which plans use."""
