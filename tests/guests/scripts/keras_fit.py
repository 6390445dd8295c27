"""A convolutional network in Keras on JAX: ``model.fit``, mixed precision, data-parallel."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

SIZE, B = 66, 512
keras.mixed_precision.set_global_policy("mixed_bfloat16")
keras.distribution.set_distribution(keras.distribution.DataParallel())

model = keras.Sequential(
    [
        keras.layers.Input((SIZE, SIZE, 3)),
        keras.layers.Conv2D(128, 3, activation="relu", use_bias=False),
        keras.layers.Conv2D(128, 2, strides=2, use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.Activation("relu"),
        keras.layers.Conv2D(256, 2, strides=2, use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.Activation("relu"),
        keras.layers.Conv2D(512, 2, strides=2, activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(1024, activation="relu"),
        keras.layers.Dense(1000, dtype="float32"),
    ]
)
model.compile(
    optimizer=keras.optimizers.AdamW(1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
images = np.zeros((4 * B, SIZE, SIZE, 3), np.float32)
labels = np.zeros((4 * B,), np.int32)
model.fit(images, labels, batch_size=B, epochs=100, verbose=2)
