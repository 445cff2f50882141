// The empty module fastrl._C_cuda: importing it loads this library, which registers the operators.
#include <Python.h>

PyMODINIT_FUNC PyInit__C_cuda() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
